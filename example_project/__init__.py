"""A record shop that reminds customers to review their order; see README.md in this folder."""
