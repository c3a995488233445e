"""Tools of MCP servers. The `mcp` library is imported when a server is started, no sooner."""

from mt_grpo.tools.mcp.config import McpServerConfig, read_servers
from mt_grpo.tools.mcp.server import McpServer, McpToolError
from mt_grpo.tools.mcp.tools import mcp_tools, result_text

__all__ = ["McpServer", "McpServerConfig", "McpToolError", "mcp_tools", "read_servers", "result_text"]
