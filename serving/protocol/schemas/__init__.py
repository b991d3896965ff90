"""JSON Schema of every message of TDP/1, as files. json_schemas.py writes them."""
