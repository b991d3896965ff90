"""Files for running servers: systemd units, configurations, images, a dashboard.

`thor-dflash template` prints them.
"""
