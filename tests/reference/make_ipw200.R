# Writes ipw200_R.json and ipw200_fitted_R.csv from ipw200.csv. Run: Rscript make_ipw200.R
suppressPackageStartupMessages({library(survey); library(jsonlite)})
options(digits=17)
z <- read.csv("ipw200.csv"); n <- nrow(z); z$z3 <- factor(z$z3)
m <- glm(e~z1+z2+z3,data=z,family=binomial,control=glm.control(epsilon=1e-15,maxit=100))
p <- fitted(m); E <- z$e==1; w <- ifelse(E,1/p,0); Z <- model.matrix(m)
ht <- sum(w*z$y)/n; hj <- sum(w*z$y)/sum(w)
# linearised SE of Hajek with known weights, and M-estimation SE with the propensity estimated
u <- w*(z$y-hj); se_naive <- sqrt(sum(u^2))/sum(w)
sc <- Z*(z$e-p); I <- crossprod(Z*(p*(1-p)),Z); Hb <- colSums(Z*(-(1-p)*w*(z$y-hj)))
infl <- (u + drop(sc%*%solve(I,Hb)))/sum(w); se_m <- sqrt(sum(infl^2))
Hh <- colSums(Z*(-(1-p)*w*z$y)); infl_ht <- (w*z$y-ht + drop(sc%*%solve(I,Hh)))/n; se_ht <- sqrt(sum(infl_ht^2))
# standardised mean differences of the weighted enrolled against the population
X <- Z[,-1]; before <- (colMeans(X[E,])-colMeans(X))/apply(X,2,sd); after <- (colSums(X*w)/sum(w)-colMeans(X))/apply(X,2,sd)
# calibration on top of 1/p
d1 <- z[E,]; d1$w <- w[E]; ds <- svydesign(ids=~1,weights=~w,data=d1); pt <- n*colMeans(Z)
cal <- calibrate(ds,~z1+z2+z3,pt,calfun="raking",epsilon=1e-13,maxit=200)
cl <- calibrate(ds,~z1+z2+z3,pt,calfun="linear",epsilon=1e-13)
o <- list(coef=as.list(coef(m)),se=as.list(sqrt(diag(vcov(m)))),deviance=deviance(m),loglik=as.numeric(logLik(m)),
 n_enrolled=sum(E),sum_w=sum(w),ess=sum(w)^2/sum(w^2),p_min=min(p),p_max=max(p),ht_mean=ht,hajek_mean=hj,
 se_hajek_weights_known=se_naive,se_hajek_m_estimation=se_m,se_ht_m_estimation=se_ht,
 unweighted_mean_enrolled=mean(z$y[E]),population_mean=mean(z$y),smd_before=as.list(before),smd_after=as.list(after),
 ipw_then_raking_mean=unname(coef(svymean(~y,cal))),se_ipw_then_raking=as.numeric(SE(svymean(~y,cal))),
 ipw_then_greg_mean=unname(coef(svymean(~y,cl))),se_ipw_then_greg=as.numeric(SE(svymean(~y,cl))),
 svyglm_hajek_se=as.numeric(SE(svymean(~y,ds))))
write_json(o,"ipw200_R.json",auto_unbox=TRUE,digits=NA,pretty=TRUE)
wr <- rep(NA,n); wr[E] <- weights(cal); wl <- rep(NA,n); wl[E] <- weights(cl)
write.csv(format(data.frame(z,p=p,w=w,w_ipw_raked=wr,w_ipw_greg=wl),digits=17,trim=TRUE),"ipw200_fitted_R.csv",row.names=FALSE,quote=FALSE)
