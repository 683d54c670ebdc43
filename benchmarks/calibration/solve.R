# Solve one problem with one solver of R and time it; as solve.py, with raw doubles for arrays.
#
#     Rscript solve.R SOLVER KIND DIRECTORY
#
# Solvers: survey (grake, the iteration inside survey::calibrate), survey-calibrate (all of it) and
# sampling (sampling::calib).
suppressPackageStartupMessages(library(survey))
suppressPackageStartupMessages(library(sampling))
arguments <- commandArgs(trailingOnly = TRUE)
solver <- arguments[1]
kind <- arguments[2]
path <- function(name) file.path(arguments[3], name)
read <- function(name) readBin(path(name), "double", file.size(path(name)) / 8)
mu <- read("mu.f64")
X <- matrix(read("X.f64"), ncol = length(mu), dimnames = list(NULL, paste0("x", seq_along(mu))))
n <- nrow(X)
population <- n * c("(Intercept)" = 1, setNames(mu, colnames(X)))
bounds <- switch(kind, quadratic = c(0, Inf), logit = c(0.05, 8), c(-Inf, Inf))
name <- switch(kind, linear = , quadratic = "linear", logit = "logit", "raking")
epsilon <- 1e-9 # of |missed total| / (1 + |total|)

prepared <- list(
  survey = function() {
    Z <- cbind("(Intercept)" = 1, X)
    calfun <- switch(name, linear = cal.linear, logit = cal.logit, cal.raking)
    limits <- list(lower = bounds[1], upper = bounds[2])
    function() {
      as.vector(grake(Z, rep(1, n), calfun,
        bounds = limits, population = population, epsilon = epsilon, verbose = FALSE, maxit = 50
      ))
    }
  },
  "survey-calibrate" = function() {
    design <- svydesign(ids = ~1, weights = rep(1, n), data = as.data.frame(X))
    given <- list(design, reformulate(colnames(X)), population, calfun = name, bounds = bounds)
    function() weights(do.call(calibrate, c(given, epsilon = epsilon, maxit = 50)))
  },
  sampling = function() { # fixes its tolerance at 1e-6 of a total
    given <- list(Xs = cbind(1, X), d = rep(1, n), total = as.vector(population), method = name)
    if (kind == "quadratic") given$method <- "truncated"
    if (kind == "quadratic") given$bounds <- c(0, 1e6)
    if (kind == "logit") given$bounds <- bounds
    function() as.vector(do.call(calib, given))
  }
)

outcome <- tryCatch(
  {
    solve_once <- prepared[[solver]]()
    repeats <- numeric()
    while (length(repeats) < if (length(repeats) == 0 || repeats[1] < 3) 3 else 1) {
      repeats <- c(repeats, system.time(found <- solve_once(), gcFirst = TRUE)[["elapsed"]])
    }
    if (length(found) != n) stop("returned no weights")
    writeBin(as.double(found), path("weights.f64"))
    sprintf('"seconds": %f, "repeats": [%s]', min(repeats), toString(repeats))
  },
  error = function(e) sprintf('"failed": "%s"', gsub('["\\\\\n]', " ", conditionMessage(e)))
)
package <- sub("-.*", "", solver)
cat(sprintf(
  '{%s, "versions": {"R": "%s", "%s": "%s", "BLAS": "%s"}}', outcome, getRversion(), package,
  packageVersion(package), basename(dirname(extSoftVersion()[["BLAS"]]))
), file = path("report.json"))
