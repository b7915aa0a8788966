"""The endpoints that need no engine: tokens of texts, and texts of tokens."""

from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.input_processing.prepared_request import PreparedAnswer


async def prepared_answer_route(
    _: AppState, prepared: PreparedAnswer, __: RequestContext
) -> ResponseBody:
    """Answer `/tokenize` or `/detokenize`: whoever prepared the request has answered it."""
    return prepared.body
