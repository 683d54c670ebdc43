[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "1.0.0"
description = "A Flower app whose model serves the whole population"
license = "Apache-2.0"
dependencies = ["flwr>=1.41", "numpy>=2.0", "polars>=1.20"]  # and fedipw[flower]

[tool.hatch.build.targets.wheel]
packages = ["$package"]

[tool.flwr.app]
publisher = "$package"

[tool.flwr.app.components]
serverapp = "$package.server_app:app"
clientapp = "$package.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 5
learning-rate = 0.1
# Settings of FedIPW begin with fedipw-; flwr run -c sets any key that stands here.
fedipw-population = ""                   # absolute path of a table: unit_id, enrolled, covariates
fedipw-ledger = ""                       # absolute path of a directory for rounds and models
fedipw-enrollment = "age + C(os)"        # what enrollment depends on, columns of the table
fedipw-participation = "age + battery"   # battery is not in the table: clients are asked
fedipw-subgroups = "os"                  # metrics of the target population by these columns
fedipw-scheme = ""                       # the default method
