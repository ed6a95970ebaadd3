"""Variables that a container platform sets for a service: they look like levers where its name begins with MUSTER.

Kubernetes sets ``X_SERVICE_HOST``, ``X_SERVICE_PORT`` (and ``X_SERVICE_PORT_<NAME>``), and with Docker's links
``X_PORT`` and ``X_PORT_<number>_<protocol>``, the last with ``_PROTO``, ``_PORT`` and ``_ADDR`` too. A lever of such a
name with another value was set by somebody else.
"""

import re
from collections.abc import Mapping

# Any name that resembles one of these: no lever may be declared so.
_RESEMBLES = re.compile(r"MUSTER_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT.*|PORT(?:_.*)?)\Z")
_NAME = re.compile(
    r"(?P<service>MUSTER(?:_.*?)??)_(?:(?P<host>SERVICE_HOST)|(?P<port>SERVICE_PORT(?:_[A-Z0-9_]+)?)"
    r"|PORT(?:_(?P<number>[0-9]{1,5})_(?P<protocol>TCP|UDP|SCTP)(?:_(?P<part>PROTO|PORT|ADDR))?)?)\Z"
)
_ADDRESS = re.compile(
    r"(?P<protocol>tcp|udp|sctp)://(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<four>[0-9.]+)):(?P<port>[0-9]{1,5})"
)


def resembles_service(name: str) -> bool:
    """Whether a name resembles a platform's: a lever of that name is mistaken for one, or ignored."""
    return _RESEMBLES.match(name) is not None


def is_service_variable(name: str, values: Mapping[str, object]) -> bool:
    """Whether a platform set one of these variables: by its name, its value, and those that are always set with it."""
    match = _NAME.match(name)
    if match is None:
        return False
    service, text = match["service"], _text(values, name)
    if match["host"]:
        return _is_host(text)
    if match["port"]:
        return _is_port(text) and _is_host(_text(values, f"{service}_SERVICE_HOST"))
    if not match["part"]:
        return _address(text) is not None
    whole = _address(_text(values, name.removesuffix(f"_{match['part']}")))
    if whole is None:
        return False
    parts = {"PROTO": whole["protocol"], "PORT": whole["port"], "ADDR": whole["six"] or whole["four"]}
    return text == parts[match["part"]]


def _text(values: Mapping[str, object], name: str) -> str:
    return str(values.get(name, "")).strip()


def _address(text: str) -> re.Match[str] | None:
    match = _ADDRESS.fullmatch(text)
    if match is None or not _is_host(match["six"] or match["four"]) or not _is_port(match["port"]):
        return None
    return match


def _is_host(text: str) -> bool:
    from ipaddress import ip_address  # not for the boots that have no such variable

    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,4}", text) is not None and int(text) < 2**16
