#!/bin/sh
# ray 2.55.0 with protobuf 7.36.2, which pip installs with it, as it asks for protobuf>=3.20.3: Ray Serve starts, and
# then deploys nothing. Its controller reads each deployment's configuration back by FieldDescriptor.label, which
# protobuf 7 has removed, so serve.run of any application ends with an AttributeError from another process. With
# protobuf 6.33.5 the same configuration comes back as it was. So an older Ray that a project allows may be one that
# no fresh installation can serve with; 2.60 can. Seen: AttributeError: ... object has no attribute 'label'; 3
# replicas.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray[serve]==2.55.0" protobuf==7.36.2
cat > "$folder/deployment.py" <<'PY'
import google.protobuf
import importlib.metadata
from ray.serve._private.config import DeploymentConfig

asked = [r for r in importlib.metadata.requires("ray") if r.startswith("protobuf")]
told = DeploymentConfig(num_replicas=3).to_proto_bytes()
try:
    found = f"{DeploymentConfig.from_proto_bytes(told).num_replicas} replicas"
except AttributeError as e:
    found = f"AttributeError: {e}"
print(f"protobuf {google.protobuf.__version__} (asked for: {asked[0]}): {found}")
PY
new=$("$folder/venv/bin/python" "$folder/deployment.py" 2>/dev/null)
"$folder/venv/bin/pip" install --quiet protobuf==6.33.5
old=$("$folder/venv/bin/python" "$folder/deployment.py" 2>/dev/null)
printf '%s\n%s\n' "$new" "$old"
case "$new" in *"has no attribute 'label'"*) ;; *) exit 1 ;; esac
case "$old" in *": 3 replicas") ;; *) exit 1 ;; esac
