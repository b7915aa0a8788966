"""`PYTHONPATH` folder whose `sitecustomize` starts the watch agent in every job process."""
