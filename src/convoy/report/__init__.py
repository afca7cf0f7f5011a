"""The result for people: summary, tables, HTML page."""
