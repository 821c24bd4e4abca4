"""The figures of the reports: every function takes pandas frames and returns a plotly figure of fixed height."""

from lab.figures.cache import hits_over_time, prefix_tree
from lab.figures.compare import ecdf, paired_bars
from lab.figures.golden import golden_heatmap
from lab.figures.instances import instance_lanes
from lab.figures.peers import exactness, race
from lab.figures.stalls import tradeoff, victim_timeline
from lab.figures.steps import batch_composition, kv_occupancy
from lab.figures.style import use_template
from lab.figures.timeline import timeline, timelines
from lab.figures.workload import length_scatter

__all__ = [
    "batch_composition",
    "ecdf",
    "exactness",
    "golden_heatmap",
    "hits_over_time",
    "instance_lanes",
    "kv_occupancy",
    "length_scatter",
    "paired_bars",
    "prefix_tree",
    "race",
    "timeline",
    "timelines",
    "tradeoff",
    "use_template",
    "victim_timeline",
]
