"""The terminal views' common part: frame, widgets, drawing in text, recordings.

Pure functions draw lines of text with roles (`styled_text`, `bars`, `plot`, `table`, `stage_bars`);
`widgets` and `app` show them with textual. Sources (`source`, `recording`) deliver the documents
that are drawn.
"""
