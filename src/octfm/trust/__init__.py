"""The questions of the trust report, one file each; `report.trust` answers all of them."""
