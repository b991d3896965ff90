"""Starts the node: ros2 launch thor_dflash_ros planner.launch.py namespace:=arm0."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode


def generate_launch_description() -> LaunchDescription:
    """The node, with its parameters from a file."""
    usual = Path(get_package_share_directory("thor_dflash_ros"), "config", "planner.yaml")
    return LaunchDescription(
        [
            DeclareLaunchArgument("namespace", default_value=""),
            DeclareLaunchArgument("params_file", default_value=str(usual)),
            DeclareLaunchArgument("log_level", default_value="info"),
            LifecycleNode(
                package="thor_dflash_ros",
                executable="planner",
                name="thor_dflash",
                namespace=LaunchConfiguration("namespace"),
                parameters=[LaunchConfiguration("params_file")],
                arguments=["--ros-args", "--log-level", LaunchConfiguration("log_level")],
                output="screen",
            ),
        ]
    )
