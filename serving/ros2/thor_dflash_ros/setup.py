"""The ament package of the node. `thor-dflash` itself comes from pip."""

from setuptools import setup

NAME = "thor_dflash_ros"

setup(
    name=NAME,
    version="0.2.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", ["launch/planner.launch.py"]),
        (f"share/{NAME}/config", ["config/planner.yaml"]),
    ],
    license="Apache-2.0",
    entry_points={"console_scripts": [f"planner = {NAME}.node:main"]},
)
