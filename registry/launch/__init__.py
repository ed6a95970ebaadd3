"""From checked arguments to a launch, on the host or on a device."""
