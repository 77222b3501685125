"""Policy versions on disk and over gRPC, in every sampler's format."""
