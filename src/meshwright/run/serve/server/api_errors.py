"""What goes wrong with a request, as clients of the OpenAI API expect to be told."""

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from meshwright.errors import InputError

ERROR_PATH_PATTERN = re.compile(r" - at (?:`\w+` in )?`\$([^`]*)`$")
FIELD_NAME_PATTERN = re.compile(r"(?:missing required|unknown) field `([^`]*)`")
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


MAX_MESSAGE_CHARS = 4000
MAX_PARAM_CHARS = 400


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inside of an error's body."""

    message: str
    type: str
    param: str | None = None
    """The field of the request that is at fault."""
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of an error."""

    error: ErrorInfo


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # What a client sent may be a part of both: an error does not send it all back.
        self.message = _shorten(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else _shorten(param, MAX_PARAM_CHARS)
        self.code = code
        self.retry_after_s = retry_after_s

    def summary(self) -> str:
        """Return what it is called in logs and traces."""
        return self.code or str(self.status)

    def to_json(self) -> bytes:
        """Return the body."""
        kind = ERROR_TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        detail = ErrorInfo(self.message, kind, self.param, self.code)
        return msgspec.json.encode(ErrorResponse(detail))

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers

    def response(self, more: Mapping[str, str] | None = None) -> Response:
        """Return it as an answer."""
        headers = {**self.headers(), **(more or {})}
        return Response(self.to_json(), self.status, headers=headers, media_type="application/json")


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def invalid_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return the fault of a request that says something that cannot be."""
    return ApiError(400, message, param=param, code=code)


def invalid_body(error: msgspec.DecodeError | UnicodeDecodeError) -> ApiError:
    """Return the fault of a body that is no JSON, or whose fields have the wrong types."""
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"The body is not JSON: {error}", code="invalid_json")
    text = str(error)
    path = ""
    if found := ERROR_PATH_PATTERN.search(text):
        path = found[1].lstrip(".")
        text = text[: found.start()]
    if found := FIELD_NAME_PATTERN.search(text):
        path = f"{path}.{found[1]}".lstrip(".")
        if "unknown" in found[0]:
            return invalid_request(f"Unknown field `{path}`", path, "unknown_field")
        return invalid_request(f"The field `{path}` is missing", path, "missing_field")
    where = f"`{path}`: " if path else ""
    return invalid_request(f"{where}{text}", path or None, "invalid_type")


def unservable_request(
    error: InputError, param: str | None = None, fields: Mapping[str, str] | None = None
) -> ApiError:
    """Return the fault of a request that the engine cannot answer at all.

    `fields` says what the request calls things that the engine has other names for.
    """
    told = fields or {}
    problems = [one._replace(where=told.get(one.where, one.where)) for one in error.problems]
    where = problems[0].where if problems else ""
    return invalid_request(str(InputError(problems)), where or param)
