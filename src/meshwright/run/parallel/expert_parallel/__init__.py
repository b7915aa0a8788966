"""Expert parallelism: token dispatch and combine by all-to-all between expert ranks."""
