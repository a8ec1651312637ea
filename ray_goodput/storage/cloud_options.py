"""From `storage_options` in the spelling of s3fs, and the environment, to a configured obstore client.

What is not given is looked up as AWS tools do: environment variables first, then (through botocore) profiles in
`~/.aws`, web identity, container and instance credentials.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_goodput.errors import ConfigError

# Tuning of s3fs itself: without meaning here, harmless to ignore.
_IGNORED = {
    "asynchronous",
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "loop",
    "max_concurrency",
    "session",
    "skip_instance_cache",
    "use_listings_cache",
    "version_aware",
}
_PLAIN = {
    "key": "key",
    "username": "key",
    "secret": "secret",
    "password": "secret",
    "token": "token",
    "endpoint_url": "endpoint_url",
    "anon": "anon",
    "use_ssl": "use_ssl",
    "profile": "profile",
    "requester_pays": "requester_pays",
}
_CLIENT_KWARGS = {
    "endpoint_url": "endpoint_url",
    "region_name": "region",
    "use_ssl": "use_ssl",
    "verify": "verify",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
}
_UPLOAD_KWARGS = {"ServerSideEncryption": "aws_server_side_encryption", "SSEKMSKeyId": "aws_sse_kms_key_id"}
_CREDENTIALS_LIFE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Everything needed to reach a bucket. Never logged: `key`, `secret` and `token` are left out of its repr."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    use_ssl: bool = True
    verify: bool | str = True
    requester_pays: bool = False
    virtual_host: bool = False
    upload: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any], env: Mapping[str, str] | None = None) -> S3Options:
        """Read s3fs options; what they leave open comes from the `AWS_*` variables of `env` (default: the process's).

        Raises:
            ConfigError: an option that is not understood, or a key without its secret. Values are never shown.
        """
        env = os.environ if env is None else env
        found: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in options.items():
            if name in _PLAIN:
                found[_PLAIN[name]] = value
            elif name == "client_kwargs":
                unknown += _take(found, value, _CLIENT_KWARGS, name)
            elif name == "s3_additional_kwargs":
                upload: dict[str, Any] = {}
                unknown += _take(upload, value, _UPLOAD_KWARGS, name)
                found["upload"] = upload
            elif name == "config_kwargs":
                unknown += _take_config(found, value)
            elif name not in _IGNORED:
                unknown.append(name)
        if unknown:
            raise ConfigError(
                f"Unknown storage options for s3://: {', '.join(sorted(unknown))}. Known: {', '.join(sorted(_PLAIN))}, "
                f"client_kwargs ({', '.join(_CLIENT_KWARGS)}), config_kwargs (s3.addressing_style), "
                f"s3_additional_kwargs ({', '.join(_UPLOAD_KWARGS)})."
            )
        found = {name: value for name, value in found.items() if value is not None}
        if ("key" in found) != ("secret" in found):
            raise ConfigError("Storage options hold only one of `key` and `secret`: give both, or neither.")
        found.setdefault("endpoint_url", env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None)
        found.setdefault("region", env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None)
        if "key" not in found and "profile" not in found and not found.get("anon") and env.get("AWS_ACCESS_KEY_ID"):
            found["key"] = env["AWS_ACCESS_KEY_ID"]
            found["secret"] = env.get("AWS_SECRET_ACCESS_KEY")
            found["token"] = env.get("AWS_SESSION_TOKEN")
            if not found["secret"]:
                raise ConfigError("AWS_ACCESS_KEY_ID is set but AWS_SECRET_ACCESS_KEY is not: set both, or neither.")
        return cls(**found)

    @property
    def endpoint(self) -> str | None:
        """The endpoint with a scheme; None stands for AWS's own."""
        if not self.endpoint_url or "://" in self.endpoint_url:
            return self.endpoint_url
        return f"{'https' if self.use_ssl else 'http'}://{self.endpoint_url}"

    def client(self, bucket: str, *, retries: int, total_s: float, request_timeout_s: float) -> Any:
        """An obstore client for `bucket`. Sends nothing."""
        from obstore.store import S3Store

        config: dict[str, Any] = {"region": self.region or "us-east-1", **self.upload}
        endpoint = self.endpoint
        if endpoint:
            scheme, _, host = endpoint.rstrip("/").partition("://")
            config["endpoint"] = f"{scheme}://{bucket}.{host}" if self.virtual_host else f"{scheme}://{host}"
            # Bulk delete differs between servers (some answer in a form that cannot be read for missing keys).
            config["disable_bulk_delete"] = True
        config["virtual_hosted_style_request"] = self.virtual_host
        if self.requester_pays:
            config["request_payer"] = True
        if self.anon:
            config["skip_signature"] = True
        client_options: dict[str, Any] = {
            "allow_http": bool(endpoint) and str(endpoint).startswith("http://"),
            "timeout": timedelta(seconds=request_timeout_s),
            "connect_timeout": timedelta(seconds=5),
        }
        if self.verify is False:
            client_options["allow_invalid_certificates"] = True
        elif isinstance(self.verify, str):
            with open(self.verify, "rb") as file:
                client_options["root_certificate"] = file.read()
        return S3Store(
            bucket,
            config=config,  # pyright: ignore[reportArgumentType] (made of strings, obstore wants its typed dictionaries)
            client_options=client_options,  # pyright: ignore[reportArgumentType] (likewise)
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=total_s),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=4), "base": 2},
            },
            # A provider, so that no variable of the environment mixes with what was given (a foreign session token).
            credential_provider=None if self.anon else self._credentials(),  # pyright: ignore[reportArgumentType] (likewise)
        )

    def botocore_client(self) -> Any:
        """The same address and credentials as a botocore client, for what obstore cannot do."""
        import botocore.config
        import botocore.session

        session = botocore.session.Session(profile=self.profile)
        style = "virtual" if self.virtual_host else "path"
        unsigned: dict[str, Any] = {"signature_version": botocore.UNSIGNED} if self.anon else {}
        return session.create_client(
            "s3",
            region_name=self.region or "us-east-1",
            endpoint_url=self.endpoint,
            verify=self.verify,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            aws_session_token=self.token,
            config=botocore.config.Config(s3={"addressing_style": style}, retries={"max_attempts": 3}, **unsigned),
        )

    def _credentials(self) -> Callable[[], dict[str, Any]]:
        if self.key is not None:
            fixed = {"access_key_id": self.key, "secret_access_key": self.secret, "token": self.token}
            return lambda: {**fixed, "expires_at": None}
        profile = self.profile
        session: list[Any] = []

        def look_up() -> dict[str, Any]:
            import botocore.session

            if not session:
                session.append(botocore.session.Session(profile=profile))
            found = session[0].get_credentials()
            if found is None:
                raise PermissionError("no credentials found in options, environment, ~/.aws or instance metadata")
            frozen = found.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                # botocore renews by itself; asking it again from time to time is all that is needed.
                "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
            }

        return look_up


def _take(into: dict[str, Any], values: Mapping[str, Any] | None, names: Mapping[str, str], group: str) -> list[str]:
    """Known entries of one group of options go `into`; returns the others, as `group.name`. Never overwrites."""
    unknown = []
    for name, value in (values or {}).items():
        if name in names:
            into.setdefault(names[name], value)
        else:
            unknown.append(f"{group}.{name}")
    return unknown


def _take_config(into: dict[str, Any], values: Mapping[str, Any] | None) -> list[str]:
    unknown = []
    for name, value in (values or {}).items():
        if name == "s3" and isinstance(value, Mapping) and set(value) <= {"addressing_style"}:
            into["virtual_host"] = value.get("addressing_style") == "virtual"
        elif name not in ("retries", "connect_timeout", "read_timeout", "max_pool_connections", "signature_version"):
            unknown.append(f"config_kwargs.{name}")
    return unknown
