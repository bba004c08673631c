"""The TLS options of a URL, as `etcds://` and `zookeepers://` take them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from ..protocol.errors import ConfigurationError

__all__ = ["OPTIONS", "check_options", "context_of", "unverified"]

OPTIONS = ("ca", "cert", "key", "verify")


def check_options(options: Mapping[str, str], where: str) -> None:
    """Check TLS options: each must be one of `OPTIONS`, and its file readable.

    Args:
        options: The options, by name.
        where: Name of the URL in errors.

    Raises:
        ConfigurationError: They cannot work.
    """
    if options.get("verify", "yes") not in ("yes", "no"):
        raise ConfigurationError(f"{where}: verify is yes or no, not {options['verify']!r}")
    if "key" in options and "cert" not in options:
        raise ConfigurationError(f"{where}: it names a key without the cert that it belongs to")
    try:
        context_of(options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{where}: its certificates cannot be read: {error}") from None


def context_of(options: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context for some options."""
    context = ssl.create_default_context(cafile=options.get("ca"))
    if options.get("verify", "yes") == "no":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "cert" in options:
        context.load_cert_chain(options["cert"], options.get("key"))
    return context


def unverified(options: Mapping[str, str] | None) -> str:
    """Return the option that makes TLS check the server's certificate, if it does not; else ""."""
    return "verify" if options and options.get("verify") == "no" else ""
