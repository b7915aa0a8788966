"""The OpenAI API: routes, request and response schemas, streaming and tool choice.

`request_conversion` turns validated request bodies into engine requests, and `choice_stream`
turns engine outputs into events.
"""
