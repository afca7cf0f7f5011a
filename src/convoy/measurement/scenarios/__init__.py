"""MLPerf's scenarios: single stream, offline, and a server under a schedule of arrivals (docs/how-to/serve.md)."""
