"""What the scripts beside this one are asked for, and how they say what came."""

import json
import sys

asked = json.loads(sys.argv[1])
base = asked["url"] + "/v1"
talks = asked.get("talks", "") + "/v1"  # of `Talks` in plans.py
greedy = {"temperature": 0, "max_tokens": asked["max_tokens"]}
system, user = (message["content"] for message in asked["messages"])


def say(**said):
    print(json.dumps(said))
