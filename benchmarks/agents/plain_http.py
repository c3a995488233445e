"""An agent that talks over one connection with the standard library alone: the least that a client can cost."""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

row = json.load(sys.stdin)
url = urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
connection = http.client.HTTPConnection(url.hostname, url.port)
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(row["turns"]):
    connection.request("POST", f"{url.path}/chat/completions", json.dumps({"messages": messages}), headers)
    answer = json.loads(connection.getresponse().read())
    messages += [answer["choices"][0]["message"], {"role": "user", "content": row["reply"]}]
