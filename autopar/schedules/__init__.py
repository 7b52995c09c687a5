"""Pipeline schedules: tables of actions, their proof and their time."""

from autopar.schedules.actions import Action, Kind, Row, Schedule
from autopar.schedules.checker import buffers_needed, peak_live, verify
from autopar.schedules.makespan import ChunkTime, Timeline, simulate
from autopar.schedules.table import SCHEDULES, ScheduleSpec, Size, schedule_named
from autopar.schedules.weights import Costs

__all__ = [
    "SCHEDULES",
    "Action",
    "ChunkTime",
    "Costs",
    "Kind",
    "Row",
    "Schedule",
    "ScheduleSpec",
    "Size",
    "Timeline",
    "buffers_needed",
    "peak_live",
    "schedule_named",
    "simulate",
    "verify",
]
