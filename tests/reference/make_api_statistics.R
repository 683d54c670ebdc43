# Writes api_strat.csv, api_clus1.csv and api_statistics.json. Run: Rscript make_api_statistics.R
# Means, proportions, quantiles, ratios, domain totals and differences of domains by survey, on
# one-phase designs of its api data.
suppressPackageStartupMessages(library(survey))
options(digits = 17)
data(api)

columns <- c("snum", "dnum", "stype", "api00", "api99", "enroll", "api.stu", "awards", "pw")
strat <- apistrat[columns]; clus1 <- apiclus1[columns]
# base weights as they are, with all their digits: pw of the package has seven
strat$pw <- unname(c(E = 4421 / 100, H = 755 / 50, M = 1018 / 50)[as.character(strat$stype)])
clus1$pw <- 757 / 15
for (name in c("strat", "clus1")) {
  made <- format(get(name), digits = 17, trim = TRUE)
  write.csv(made, paste0("api_", name, ".csv"), row.names = FALSE, quote = FALSE)
}
# a yes in 30 and a yes in 10, besides awards
events <- function(d) transform(d, won = as.numeric(awards == "Yes"), top = as.numeric(api00 >= 880),
                                low = as.numeric(api00 < 450))
strat <- events(strat); clus1 <- events(clus1); strat$prob <- 1 / strat$pw

designs <- list(
  # with replacement: squares of weighted residuals about their mean, times n / (n - 1)
  strat_replacement = svydesign(ids = ~1, weights = ~pw, data = strat),
  # Poisson sampling: squares times 1 - probability, nothing else
  strat_poisson = svydesign(ids = ~1, fpc = ~prob, pps = poisson_sampling(strat$prob), data = strat),
  # districts with replacement, all their schools
  clus1_replacement = svydesign(ids = ~dnum, weights = ~pw, data = clus1)
)

plain <- function(x) unname(as.vector(x))
line <- function(m, df) {
  ci <- confint(m, df = df)
  list(estimate = plain(coef(m)[1]), se = plain(SE(m))[1], low = ci[1, 1], high = ci[1, 2])
}
proportion <- function(name, design, df) {
  m <- svymean(as.formula(paste0("~", name)), design)
  methods <- c("logit", "beta", "mean", "xlogit", "asin")
  found <- lapply(methods, function(method) {
    p <- svyciprop(as.formula(paste0("~", name)), design, method = method, df = df)
    list(low = plain(attr(p, "ci"))[1], high = plain(attr(p, "ci"))[2])
  })
  names(found) <- methods
  c(list(estimate = plain(coef(m)), se = plain(SE(m))), found)
}
quantiles <- function(design, df, at = c(0.05, 0.1, 0.25, 0.5, 0.75, 0.9)) {
  found <- svyquantile(~api00, design, at, interval.type = "mean", qrule = "math", df = df)[[1]]
  below <- lapply(seq_along(at), function(k) svymean(~I(as.numeric(api00 <= found[k, 1])), design))
  lapply(seq_along(at), function(k) list(
    at = at[k], estimate = found[k, 1], low = found[k, 2], high = found[k, 3], se = found[k, 4],
    share = plain(coef(below[[k]])), share_se = plain(SE(below[[k]]))))
}
ratio <- function(over, under, design, df) {
  r <- svyratio(as.formula(paste0("~", over)), as.formula(paste0("~", under)), design)
  ci <- confint(r, df = df)
  list(estimate = plain(coef(r)), se = plain(SE(r)), low = ci[1, 1], high = ci[1, 2])
}
statistics <- function(design) {
  df <- degf(design)
  means <- svyby(~api00, ~stype, design, svymean, covmat = TRUE)
  totals <- svyby(~enroll, ~stype, design, svytotal, covmat = TRUE)
  levels <- as.list(setNames(nm = c("E", "H", "M")))
  pairs <- list(c("E", "H"), c("E", "M"), c("H", "M"))
  list(
    rows = nrow(design$variables), df = df,
    mean = line(svymean(~api00, design), df),
    proportion = lapply(list(won = "won", low = "low", top = "top"), proportion, design, df),
    quantile = quantiles(design, df),
    ratio = list(tested = ratio("api.stu", "enroll", design, df),
                 growth = ratio("api00", "api99", design, df)),
    total = line(svytotal(~enroll, design), df),
    domain_mean = lapply(levels, function(s) list(
      estimate = plain(coef(means)[s]), se = plain(SE(means)[means$stype == s]))),
    domain_total = lapply(levels, function(s) list(
      estimate = plain(coef(totals)[s]), se = plain(SE(totals)[totals$stype == s]))),
    difference = lapply(pairs, function(p) {
      d <- svycontrast(means, setNames(list(setNames(c(1, -1), p)), "d"))
      list(first = p[1], second = p[2], estimate = plain(coef(d)), se = plain(SE(d)))
    })
  )
}

json <- function(x, pad = "") {
  deeper <- paste0(pad, "  ")
  if (is.list(x)) {
    parts <- vapply(x, json, "", pad = deeper)
    if (!is.null(names(x))) parts <- paste0('"', names(x), '": ', parts)
    ends <- if (is.null(names(x))) c("[", "]") else c("{", "}")
    return(paste0(ends[1], "\n", deeper, paste(parts, collapse = paste0(",\n", deeper)), "\n",
                  pad, ends[2]))
  }
  if (is.character(x)) return(paste0('"', x, '"'))
  if (is.na(x)) "null" else format(x, digits = 17)
}
versions <- list(R = as.character(getRversion()), survey = as.character(packageVersion("survey")))
writeLines(json(c(list(versions = versions), lapply(designs, statistics))), "api_statistics.json")
