"""State and steps of a verifier and a drafter; no grpc, no protobuf."""
