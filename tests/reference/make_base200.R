# Writes base200_R.csv from ipw200.csv with base weights. Run: Rscript make_base200.R
suppressPackageStartupMessages(library(survey))
options(digits=17)
z <- read.csv("ipw200.csv"); z$z3 <- factor(z$z3); z$a <- c(1,2.5,4,1.5)[z$id%%4+1]; N <- sum(z$a)
ds <- svydesign(ids=~1,weights=~a,data=z)
m <- svyglm(e~z1+z2+z3,design=ds,family=quasibinomial,epsilon=1e-15,maxit=100)
p <- as.numeric(fitted(m)); E <- z$e==1; w <- ifelse(E,z$a/p,0); Z <- model.matrix(m)
ht <- sum(w*z$y)/N; hj <- sum(w*z$y)/sum(w)
# M-estimation: rows are the units, their base weights taken as given
sc <- Z*(z$a*(z$e-p)); I <- crossprod(Z*(z$a*p*(1-p)),Z)
Hb <- colSums(Z*(-(1-p)*w*(z$y-hj))); infl <- (w*(z$y-hj) + drop(sc%*%solve(I,Hb)))/sum(w)
# the enrolled calibrated from their base weights to the means of the population
X <- Z[E,]; a <- z$a[E]; y <- z$y[E]; pt <- colSums(Z*z$a)
lin <- a*(1+drop(X%*%solve(crossprod(X*a,X),pt-colSums(X*a)))); l <- rep(0,ncol(X))
for (k in 1:50) {rk <- a*exp(drop(X%*%l)); l <- l+solve(crossprod(X*rk,X),pt-colSums(X*rk))}
o <- c(setNames(coef(m),paste0("coef_",names(coef(m)))),population_size=N,
 setNames(colSums(Z*z$a)/N,paste0("mean_",colnames(Z))),ht_mean=ht,hajek_mean=hj,
 se_hajek_m_estimation=sqrt(sum(infl^2)),raking_mean=sum(rk*y)/sum(rk),
 greg_mean=sum(lin*y)/sum(lin),setNames(rk,paste0("raking_",z$id[E])))
write.csv(data.frame(name=names(o),value=trimws(formatC(o,digits=17,format="g"))),"base200_R.csv",row.names=FALSE,quote=FALSE)
