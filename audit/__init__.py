"""The boot-time audit: session, rules, verdict, reports and replay."""
