"""The endpoints that answer from what is at hand: tokens of texts, and changes of the engine."""

from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import invalid_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.protocol.request_conversion import (
    convert_chat_messages,
    require_chat_template_kwargs,
    resolve_model,
)
from meshwright.run.serve.server.protocol.request_schema import DetokenizeRequest, TokenizeRequest
from meshwright.run.serve.server.protocol.response_schema import (
    DetokenizeResponse,
    TokenizeResponse,
)
from meshwright.run.serve.server.protocol.tool_choice import to_template_tool
from meshwright.run.serve.server.sse import encode
from meshwright.run.serve.server.tokenization import (
    encode_chat_prompt,
    encode_text,
    run_in_thread_if_long,
    validate_token_ids,
)


async def tokenize_route(
    app_state: AppState, body: TokenizeRequest, _: RequestContext
) -> ResponseBody:
    """Answer with the tokens of a text or of a chat."""
    resolve_model(body.model, app_state.config)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("Give either `prompt` or `messages`", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await encode_text(app_state.tokenizer, body.prompt, "prompt", special=special)
    else:
        values = {
            "add_generation_prompt": body.add_generation_prompt,
            **require_chat_template_kwargs(body.chat_template_kwargs),
        }
        tools = [to_template_tool(tool.function) for tool in body.tools or ()] or None
        tokens = await encode_chat_prompt(
            app_state.tokenizer, convert_chat_messages(body.messages or []), tools, values
        )
    words, spells = app_state.tokenizer, body.return_token_strs

    def written() -> bytes:
        texts = None
        if spells:
            texts = [words.token_bytes(token).decode(errors="replace") for token in tokens]
        return encode(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=app_state.engine.max_model_len,
                tokens=list(tokens),
                token_strs=texts,
            )
        )

    return await run_in_thread_if_long(written, len(tokens), "prompt")


async def detokenize_route(
    app_state: AppState, body: DetokenizeRequest, _: RequestContext
) -> ResponseBody:
    """Answer with the text of tokens, special ones included: the way back of `tokenize_route`."""
    resolve_model(body.model, app_state.config)
    words, tokens = (
        app_state.tokenizer,
        validate_token_ids(body.tokens, app_state.tokenizer, "tokens"),
    )
    text = await run_in_thread_if_long(
        lambda: words.decode(tokens, skip_special=False), len(tokens), "tokens"
    )
    return encode(DetokenizeResponse(text))
