"""Bodies of the HTTP API: request and response schemas, and their conversion to engine values."""
