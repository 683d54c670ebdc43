# Writes replicates_R.json from replicates.csv. Run: Rscript make_replicates.R
suppressPackageStartupMessages(library(survey))
options(digits = 17)
d <- read.csv("replicates.csv")
count <- sum(grepl("^rep_", names(d)))
design <- svrepdesign(data = d, weights = ~weight, repweights = "^rep_[0-9]+$", type = "other",
                      scale = (count - 1) / count, rscales = rep(1, count),
                      combined.weights = TRUE, mse = FALSE)
plain <- function(x) unname(as.vector(x))[1]
m <- svymean(~value, design); t <- svytotal(~value, design)
r <- svyratio(~value, ~n, design)
b <- svyby(~value, ~rich, design, svymean, covmat = TRUE)
k <- svycontrast(b, list(d = c(yes = 1, no = -1)))
rows <- list(mean = m, total = t, ratio = r, difference = k)
text <- vapply(names(rows), function(name) sprintf('"%s": {"estimate": %.17g, "se": %.17g}', name,
               plain(coef(rows[[name]])), plain(SE(rows[[name]]))), "")
writeLines(paste0("{\n  ", paste(text, collapse = ",\n  "), "\n}"), "replicates_R.json")
