"""The tool in weather.py for programs that take tools from servers of MCP, in lines of JSON: weather_mcp.py ASKED"""

import json
import sys

from weather import FUNCTION, WEATHER

TOOL = {**{name: FUNCTION[name] for name in ("name", "description")}, "inputSchema": FUNCTION["parameters"]}


def answer(method, params):
    if method == "initialize":
        own = {"name": "weather", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": own}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": WEATHER[params["arguments"]["city"]]}]}
    return {}


for line in sys.stdin:
    told = json.loads(line)
    if "id" in told:  # else it waits for no answer
        answered = {"jsonrpc": "2.0", "id": told["id"], "result": answer(told["method"], told.get("params") or {})}
        print(json.dumps(answered), flush=True)
