"""The questions of the trust report, one file each; `report.trust` asks them all."""
