"""Logs, metrics, traces, and what `tgi why` tells.

log               text and JSON logs
metrics           the table of metric series; recording and rendering them
metric_store      samples in memory-mapped files that processes of a host share
flight_recorder   stamps of every request in a ring that survives the process, for `tgi why`
request_timeline  what `tgi why` tells from these stamps
tracing, otlp     OpenTelemetry; otlp is imported only with --otlp-endpoint
progress          the progress bar and the summary at start
"""
