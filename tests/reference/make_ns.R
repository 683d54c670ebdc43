# Writes ns_R.csv: natural cubic splines of one column. Run: Rscript make_ns.R
library(splines)
options(digits=17)
x <- c(seq(-3, 13, length.out=33), 0, 1.7, 4, 10, 40)
a <- ns(x, knots=c(1.7, 4), Boundary.knots=c(0, 10))
b <- ns(x, knots=c(1, 2, 2.5, 7), Boundary.knots=c(-1, 9))
c <- ns(x, knots=NULL, Boundary.knots=c(0, 10))
y <- sin(x/3) + 0.1*x
fit <- fitted(lm(y ~ a))
out <- data.frame(x=x, y=y, a=unclass(a), b=unclass(b), c=unclass(c), fit_a=fit)
names(out) <- c("x", "y", paste0("a", 1:3), paste0("b", 1:5), "c1", "fit_a")
write.csv(format(out, digits=17, trim=TRUE), "ns_R.csv", row.names=FALSE, quote=FALSE)
