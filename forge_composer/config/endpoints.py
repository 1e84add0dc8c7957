"""The check of an endpoint's base URL, which judges and teachers share."""

from __future__ import annotations

from urllib.parse import urlsplit


def plain_url(url: str, *, fragment: bool = True) -> str:
    """The URL, if it is one of HTTP and holds no secret.

    Args:
        url: base URL of an endpoint.
        fragment: whether it may have one.

    Raises:
        ValueError: it is no http or https URL, or has credentials, a query or a fragment that it must not
    have."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected http://HOST/... or https://HOST/...")
    if parts.username or parts.password or parts.query or (parts.fragment and not fragment):
        raise ValueError("no credentials here: name the environment variable of the key in api_key_env")
    return url
