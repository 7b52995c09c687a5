"""Pipeline schedules: tables of actions, their proof and their time."""

from autopar.schedules.actions import Action, Kind, Row, Schedule
from autopar.schedules.checker import buffers_needed, peak_live, verify
from autopar.schedules.table import SCHEDULES, ScheduleSpec, Size, schedule_named

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Row",
    "Schedule",
    "ScheduleSpec",
    "Size",
    "buffers_needed",
    "peak_live",
    "schedule_named",
    "verify",
]
