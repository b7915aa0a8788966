"""Streaming tool-call parsers for Hermes, Llama, Mistral, Pythonic and Qwen3-Coder formats.

Format parsers extend `ToolParser`; `parser_registry` creates the parser for a format.
"""
