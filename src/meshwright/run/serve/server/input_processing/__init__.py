"""From the bytes of a request's body to what is asked of the engine, away from the event loop.

Decoding, checking, rendering a chat template and tokenising cost as much as a client's body makes
them cost. `InputProcessor` is how the server has them done: `ProcessInputProcessor` in processes
with bounded time and memory, `InlineInputProcessor` in this one.
"""
