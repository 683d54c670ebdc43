# Intervals of shares by survey::svyciprop on the api data, one-phase designs.
# Rscript make_intervals.R writes intervals_R.csv and intervals_api.csv beside this file.
library(survey)
data(api)

apiclus1$rare <- as.numeric(apiclus1$api00 > 800)
apiclus1$wide <- as.numeric(apiclus1$sch.wide == "Yes")
apiclus1$weight <- round(apiclus1$pw * (1 + (seq_len(nrow(apiclus1)) %% 5) / 2), 6)
designs <- list(
  clients = svydesign(id = ~1, weights = ~weight, data = apiclus1),
  clusters = svydesign(id = ~dnum, weights = ~weight, data = apiclus1)
)
rows <- list()
for (name in names(designs)) {
  design <- designs[[name]]
  for (metric in c("rare", "wide")) {
    for (group in c("all", "E", "H")) {
      part <- if (group == "all") design else subset(design, stype == group)
      formula <- as.formula(paste0("~", metric))
      mean <- svymean(formula, part)
      if (coef(mean) <= 0 || coef(mean) >= 1) next
      for (level in c(0.9, 0.95)) {
        for (method in c("logit", "beta")) {
          found <- suppressWarnings(svyciprop(formula, part, method = method, level = level))
          ends <- attr(found, "ci")
          rows[[length(rows) + 1]] <- data.frame(
            design = name, metric = metric, group = group, level = level, method = method,
            estimate = as.numeric(found), se = as.numeric(SE(mean)), rows = nrow(part),
            freedom = degf(part), low = ends[[1]], high = ends[[2]]
          )
        }
      }
    }
  }
}
number <- function(x) if (is.numeric(x)) trimws(formatC(x, digits = 17, format = "g")) else as.character(x)
out <- do.call(rbind, rows)
out[] <- lapply(out, number)
write.csv(out, "intervals_R.csv", row.names = FALSE, quote = FALSE)
data <- apiclus1[, c("dnum", "stype", "weight", "rare", "wide")]
data[] <- lapply(data, number)
write.csv(data, "intervals_api.csv", row.names = FALSE, quote = FALSE)
