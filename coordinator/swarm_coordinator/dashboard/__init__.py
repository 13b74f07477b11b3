"""The dashboard: HTTP API, web page and metrics of a run, in a process of its own.

A request must never slow the run, so nothing here runs in the coordinator's process. The
dashboard's process reads what the coordinator writes anyway (`status.json` once a second, and the
database) and makes an immutable snapshot of it, from which all requests are answered. It runs at
low priority, with bounded connections, requests and memory. `server.processes.supervisor` restarts
it when it dies.

    process          the process: wires the parts together
    http_server      HTTP/1.1 by uvicorn, with deadlines and bounds of a connection
    middleware       the host's name, limits for each address, security headers
    app              the paths, as an ASGI application
    snapshot_loop    once a second: read, make a snapshot, publish events (`sse`)
    database_reader  new rows of the database; `curve` bounds the points of the plots
    snapshot         from what was read to `api_models`, which is all that is published
    prometheus       the same for Prometheus
    page/            the web page: files that load nothing from elsewhere
"""
