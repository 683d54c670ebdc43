# $name

A Flower app whose model serves the whole population, made by `fedipw new`. It trains a logistic
regression in NumPy; put your model and your data into `$package/task.py`.

    python -m $package.task population.parquet    # a population to try it with: 40 of 120 enrolled
    export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
    flwr run . --stream --federation-config 'num-supernodes=40' \
        -c 'fedipw-population="/absolute/population.parquet" fedipw-ledger="/absolute/ledger"'

Then look at the run:

    fedipw audit --population population.parquet --rounds ledger --out audit.html
    fedipw audit --rounds ledger --training --out training.html

Your own: `fedipw-population` is a table with one row per client of the population (`unit_id`,
`enrolled` true or false, covariates). Each node says which client it is, in `describes` of
`client_app.py`: by `unit-id` in its node config, in a simulation by its number.
