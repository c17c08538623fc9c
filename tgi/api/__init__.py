"""The front end: HTTP in, server-sent events out. asyncio, falcon and uvicorn live here alone."""
