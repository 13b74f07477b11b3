"""The run over HTTP: API, dashboard and metrics, in a process of their own.

A request must never slow the run, so nothing here runs in the coordinator's process. The page's
process reads what the coordinator writes for everybody (`status.json` once a second, the database
beside it) and makes one immutable snapshot of it, from which all requests are answered. It is
niced, bounded in connections, requests and memory; when it dies the coordinator starts it again
and counts that (`companion`).

    listener    the address, and a socket that is bound before anything else
    companion   in the coordinator: starts the process, and starts it again
    process     the process itself
    server      HTTP/1.1 over trio: deadlines and bounds of a connection
    app         the paths, as an ASGI application; `guard` stands before them
    feed        once a second: read, make a snapshot, tell who listens (`hub`)
    reading     the database, only what is new; `curve` keeps it small enough to draw
    view        from what was read to `documents`, which is all that is ever said
    metrics     the same for Prometheus
    page/       the dashboard: files without anything from elsewhere
"""
