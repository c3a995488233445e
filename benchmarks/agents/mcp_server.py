"""The search of the embedded agent as an MCP server over standard input and output."""

from mt_grpo.data.embedded.tool import search

try:
    from mcp.server.mcpserver import MCPServer
except ModuleNotFoundError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("encyclopedia")
server.tool()(search)

if __name__ == "__main__":
    server.run("stdio")
