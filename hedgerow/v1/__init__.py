"""Generated protobuf code of protos/hedgerow/v1. Never edited: `make protos` writes it."""
