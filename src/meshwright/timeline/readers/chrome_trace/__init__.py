"""Streaming parser of Chrome trace-event JSON, shared by the Kineto and Perfetto readers."""
