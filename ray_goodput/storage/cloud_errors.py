"""What obstore's errors mean. They carry the HTTP answer as text only, so it is read from there; pinned by tests."""

from __future__ import annotations

import re

from ray_goodput.storage.retry import Fault, classify, classify_status

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_CAUSE = re.compile(r"kind: (ConnectionRefused|ConnectionReset|TimedOut|HostUnreachable|NetworkUnreachable)")

# 400s that say "who are you" rather than "what is this".
_ACCESS_CODES = {
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidBucketName",
    "InvalidToken",
    "NoSuchBucket",
    "PermanentRedirect",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_ACCESS_TEXT = (
    "certificate",
    "URL scheme is not allowed",
    "MissingSecretAccessKey",
    "LOCATION",
    "no credentials found",
)
_KINDS = {"Connect": "no connection", "Timeout": "timed out", "Interrupted": "connection lost"}


def status(error: BaseException) -> int | None:
    """The HTTP status in an obstore error, if there was an answer."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore's ClientError
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def code(error: BaseException) -> str | None:
    """The S3 error code of the answer; None for answers without a body (HEAD) and for no answer."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return answer.get("Error", {}).get("Code")
    match = _CODE.search(str(error))
    return match[1] if match else None


def already_exists(error: BaseException) -> bool:
    """A create-only write met an existing object."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError") and status(error) != 409


def fault_of(error: BaseException) -> Fault:
    """The kind of an error raised by an obstore call."""
    text, number = str(error), status(error)
    if code(error) in _ACCESS_CODES or any(word in text for word in _ACCESS_TEXT):
        return Fault.ACCESS
    if number is not None:
        # 409: a conditional write met another one in flight, AWS asks to try again.
        return Fault.TRANSIENT if number == 409 else classify_status(number)
    name = type(error).__name__
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Fault.ACCESS
    if name == "PreconditionError":
        return Fault.CHANGED
    if name == "GenericError":
        return Fault.FATAL if "invalid" in text.partition("\n")[0].lower() else Fault.TRANSIENT
    return classify(error)


def reason(error: BaseException) -> str:
    """One clause: status, code and the server's sentence, or what became of the connection."""
    text, number = str(error), status(error)
    if number is not None:
        match = _MESSAGE.search(text)
        message = (match[1] if match else getattr(error, "response", {}).get("Error", {}).get("Message", "")).rstrip(
            "."
        )
        words = [f"HTTP {number}", code(error) or "", f"({message})" if message else ""]
        return " ".join(word for word in words if word)
    kind, cause = _KIND.search(text), _CAUSE.search(text)
    if kind:
        what = _KINDS.get(kind[1], f"connection failed ({kind[1]})")
        return f"{what} ({cause[1]})" if cause else what
    return f"{type(error).__name__}: {' '.join(text.partition('Debug source')[0].split())[:300]}"


def advice(error: BaseException, fault: Fault) -> str:
    """What to change, as the end of a sentence that began with the endpoint and the bucket."""
    text, number = str(error), status(error)
    if code(error) == "NoSuchBucket" or isinstance(error, FileNotFoundError):
        return "no such bucket there, create it or correct the URI or endpoint_url"
    if "LOCATION" in text or number in (301, 307) or code(error) == "AuthorizationHeaderMalformed":
        return "the bucket is in another region, give client_kwargs={'region_name': ...}"
    if "certificate" in text:
        return "its certificate is not trusted, give client_kwargs={'verify': PATH_OF_A_CA_FILE}"
    if fault is Fault.ACCESS:
        return "check `key` and `secret` in storage_options (or the AWS_* variables) and what they may do"
    if number is None or fault is Fault.TRANSIENT:
        return "check that the server is up and endpoint_url is right"
    return "the server does not accept this request"
