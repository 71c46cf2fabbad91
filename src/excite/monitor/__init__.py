"""Monitoring of a training: `excite.watch`, its buffers, the writer, alerts and sinks."""
