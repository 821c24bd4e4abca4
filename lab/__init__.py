"""The lab: workloads, measuring, golden tests, figures and reports on top of :mod:`engine`."""
