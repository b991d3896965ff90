"""The plans of a thor-dflash server as a ROS 2 action. A client: no engine is imported."""
