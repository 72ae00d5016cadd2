"""An S3 server that keeps its objects in memory: `s3_server.py PORT`."""

import sys

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

# One thread: moto checks the condition of a put and stores the object in two steps, between
# which S3 lets no other request.
application = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=False)
