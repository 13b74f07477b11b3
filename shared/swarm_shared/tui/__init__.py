"""What both terminal views are made of: `swarm-client top` and `swarm-coordinator top`.

Drawing is pure (`look`, `ink`, `words`, `bars`, `plot`, `table`, `trace`): values in, lines of
text out, for a width, with or without Unicode. `widgets`, `dialogs`, `themes` and `app` put those
lines on a screen and are the only files of this package that import textual. `source` is what a
view follows, `recording` keeps and replays it. Services import nothing of this.
"""
